"""The networks on which SOAP strategies were published, as operator graphs."""
