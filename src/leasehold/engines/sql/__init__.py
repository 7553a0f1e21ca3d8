"""What the engines on SQL servers share: the verbs, the rows they are answered by, and turns at a connection."""
