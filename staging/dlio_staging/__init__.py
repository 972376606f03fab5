"""The staging tool: `dlio pack`, `dlio stage`, `dlio verify`."""
