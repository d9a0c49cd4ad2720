"""What `core new-plugin` writes: a vendor's package, made from the templates in this folder."""
