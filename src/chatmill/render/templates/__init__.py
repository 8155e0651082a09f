"""The bundled templates, one Jinja file each."""
