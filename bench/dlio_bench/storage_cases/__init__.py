"""`dlio bench storage`: a storage system measured as training reads it."""
