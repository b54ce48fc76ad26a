"""Parts of the NixlConnector: leases, side channel, transfers."""
