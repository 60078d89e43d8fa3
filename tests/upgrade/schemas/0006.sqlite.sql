CREATE INDEX decisions_by_target ON decisions (store, tier, namespace, tuner, state, id);
CREATE INDEX decisions_by_update ON decisions (updated_at);
INSERT INTO alembic_version VALUES ('0006');
