"""Profile and Cluster -> Plan. No torch."""
