"""Tools of the documentation: generated pages, code blocks and committed benchmark reports."""
