"""Where the workers are: fixed addresses, names in DNS, or the endpoints of a Kubernetes service.

OUTRIDER_TARGETS and OUTRIDER_DRAFTS name places. A place reports all of its endpoints whenever they change;
`outrider.workers.pool` opens a link to each, and ends those of endpoints that are gone.

- EndpointSlices are listed once and then watched from that version on. A watch that breaks goes on at the last
  version seen; 410 lists again. Each watch is asked to end after 30 s and abandoned after 40, so that a dead
  connection is noticed. While the API server is away the last report counts.
- A list may be wrong; a stream that carries tokens is not. A worker that is terminating or no longer listed gets no
  new sessions and keeps its link for as long as it has old ones and the stream holds.
- Not ready is not out of rotation: a full target refuses with an error of its own; it comes last.
"""
