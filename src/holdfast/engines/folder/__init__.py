"""Blobs on a folder of this machine."""
