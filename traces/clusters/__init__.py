"""Cluster profiles that come with the package, one YAML file each, and their loader."""
