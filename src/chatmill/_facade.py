"""The table of public names: which module defines each; read by the package's lazy `__getattr__`."""

PUBLIC: dict[str, str] = {
    # errors
    "ChatmillError": "errors",
    "DataError": "errors",
    "RecordError": "errors",
    "ConfigError": "errors",
    "TokenizerError": "errors",
    "FormatError": "errors",
}
