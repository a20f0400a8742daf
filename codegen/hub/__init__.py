"""A rendered package as a kernel of Hugging Face's hub: the files that go there, and what is said of them."""
