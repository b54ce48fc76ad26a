"""Building blocks of the models, as plain torch modules."""
