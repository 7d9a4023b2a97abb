"""What can be said in a yard: nouns, events, commands, beacons and API bodies, as data only."""
