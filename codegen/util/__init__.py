"""Helpers that every room uses: errors, text, and the places of shipped files."""
