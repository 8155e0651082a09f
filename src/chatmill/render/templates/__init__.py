"""The bundled templates, one file each: Jinja, or a Python module with a class named `TEMPLATE`."""
