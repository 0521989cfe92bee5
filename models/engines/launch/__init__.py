"""How real SGLang servers and their router are started: their environment, their options, their command lines.

This project never imports either. Both live in an environment of their own. `environment` asks it once for its
contents, so that `options` refuses an unknown option before anything starts.
"""
