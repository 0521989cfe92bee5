"""The rules of `configs.validate`, by subject. Each check yields one sentence per broken rule."""
