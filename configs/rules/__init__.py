"""The rules of `configs.rules.validate`, by subject. Each check yields one sentence per broken rule."""
