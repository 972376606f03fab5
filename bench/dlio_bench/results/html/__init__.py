"""The self-contained page of `dlio bench html`."""
