"""A rendered package as a kernel of Hugging Face's hub: the files of its repository, with metadata and a card."""
