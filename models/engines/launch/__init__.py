"""How real SGLang servers and their router are started: their environment, their options, their command lines.

Neither is imported here or anywhere else in this project. Both live in an environment of their own, which is asked once
what it holds (`environment`), so that an option that it does not know is refused before anything starts (`options`).
"""
