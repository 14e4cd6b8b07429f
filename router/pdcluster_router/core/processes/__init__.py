"""Several processes as one router: when each begins and ends, and how their pages are added up."""
