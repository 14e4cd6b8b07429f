"""Models for engines of this machine: the user's, and the tiny one that is made here."""
