"""A comparison as one HTML page that asks for nothing else: no script, no font, no request."""
