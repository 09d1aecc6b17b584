"""Figures of analysis results: PNG sheets and terminal graphics."""
