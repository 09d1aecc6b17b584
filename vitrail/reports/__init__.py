"""Report pages of runs and comparisons of runs, each one self-contained HTML file, from run directories alone."""
