"""A dataset as a Python object: compiled from what people hold in their hands, shown, loaded, saved and exported."""
