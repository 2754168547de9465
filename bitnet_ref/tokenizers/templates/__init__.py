"""Chat templates: Jinja with bounded work."""
