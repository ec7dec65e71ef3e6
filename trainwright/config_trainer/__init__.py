"""The config-file API."""
