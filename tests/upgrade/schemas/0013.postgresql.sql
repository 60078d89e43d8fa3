CREATE INDEX audit_by_time ON audit (at, id);
CREATE INDEX decisions_to_undo ON decisions (state) WHERE (undo IS NOT NULL);
CREATE INDEX incidents_still ON incidents (id) WHERE (closed_at IS NULL);
INSERT INTO alembic_version VALUES ('0013');
