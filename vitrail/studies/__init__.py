"""The paper's studies as commands: each module is one question, a grid of recipes, and how the answer is read."""
