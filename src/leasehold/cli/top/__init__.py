"""`leasehold top`: locks in full-screen mode, kept up to date.

command.py  the command, its loop and its keys
source.py   what is shown: of an engine, or of a server
view.py     the lines of the screen; pure
screen.py   the terminal: alternate screen, keys, size, and its state restored at the end
"""
