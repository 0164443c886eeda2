"""All files of a program as a package: written, loaded, bound to a model."""
