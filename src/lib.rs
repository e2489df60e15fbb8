//! An actor system that shares work between the nodes of a mesh, on actix.
#![forbid(unsafe_code)]
