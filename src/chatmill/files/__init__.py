"""Files that are not on this machine: stores behind URLs, and the cache that their files are copied to."""
