"""Parts of paths and URLs."""


def inside(url: str, name: str) -> str:
    """Return the path or URL of an entry of a folder, also in a chained URL (`zip://a::b.zip`)."""
    own, mark, chain = url.partition("::")
    return f"{own.rstrip('/')}/{name}{mark}{chain}"
