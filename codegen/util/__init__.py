"""What every room uses: errors, text, and where shipped files are."""
