"""Why something was refused."""


class Error(RuntimeError):
    """What was asked for cannot be done here; the text says why, and what would change that."""
