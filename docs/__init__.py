"""The documentation: pages in Markdown, and the Python that generates the others when the site is built."""
