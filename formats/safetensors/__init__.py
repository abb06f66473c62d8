"""Safetensors files and the namespaces of their tensor names."""
