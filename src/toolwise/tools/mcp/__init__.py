"""Tools from MCP servers, over stdio and HTTP."""
