"""What analysis finds, drawn: figures, an interactive page, the terminal."""
