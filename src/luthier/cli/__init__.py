"""The command `luthier`: a file per verb, imported when it is called."""
