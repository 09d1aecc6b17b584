"""SVG charts: responsive line charts of report pages, and study charts that are also files of their own."""
