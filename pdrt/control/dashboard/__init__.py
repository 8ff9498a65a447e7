"""The page that the router shows at `/`: one file for the browser, several here."""
