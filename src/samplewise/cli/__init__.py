"""`samplewise` on the command line; its packages come with the extra: pip install 'samplewise[cli]'."""
