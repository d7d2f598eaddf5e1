"""The demo: a small made-up world, its questions, and the recipe that trains the model that ships on them."""
