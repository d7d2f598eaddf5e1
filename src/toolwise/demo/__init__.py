"""The demo: questions about a small made-up world, and a recipe that trains the shipped model on them."""
