//! Everything in Windlass that decides and acts
