"""The one module that is put into a model."""
