"""What every other package uses: errors, files, processes, batches, names, the terminal. It imports none of them."""
