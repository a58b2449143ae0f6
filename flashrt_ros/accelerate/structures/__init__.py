"""The structures that come with the package. One file is one structure or a family; STRUCTURES lists what it offers."""
