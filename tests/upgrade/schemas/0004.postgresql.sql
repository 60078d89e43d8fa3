DROP INDEX prospects_by_start;
DROP INDEX windows_by_start;
CREATE TABLE hours (
	id BIGSERIAL NOT NULL,
	store VARCHAR(255) NOT NULL,
	namespace VARCHAR(255) NOT NULL,
	model VARCHAR(255) NOT NULL,
	tier VARCHAR(255) NOT NULL,
	start TIMESTAMP WITH TIME ZONE NOT NULL,
	seconds DOUBLE PRECISION NOT NULL,
	counters JSON NOT NULL,
	CONSTRAINT hours_pkey PRIMARY KEY (id)
);
CREATE TABLE stores (
	name VARCHAR(255) NOT NULL,
	url VARCHAR(255) NOT NULL,
	boot_id VARCHAR(255) NOT NULL,
	version VARCHAR(255) NOT NULL,
	first_seen TIMESTAMP WITH TIME ZONE NOT NULL,
	last_seen TIMESTAMP WITH TIME ZONE NOT NULL,
	status JSON NOT NULL,
	tuning JSON NOT NULL,
	totals JSON NOT NULL,
	pending_bypass BOOLEAN,
	expected JSON,
	expected_at TIMESTAMP WITH TIME ZONE,
	differs_since TIMESTAMP WITH TIME ZONE,
	summed_until TIMESTAMP WITH TIME ZONE,
	CONSTRAINT stores_pkey PRIMARY KEY (name)
);
CREATE INDEX hours_by_tier ON hours (store, tier, namespace, start);
CREATE INDEX prospects_by_time ON prospects (start);
CREATE INDEX windows_by_store ON windows (store, start);
CREATE INDEX windows_with_candidates ON windows (store, tier, start) WHERE (requests > 0);
INSERT INTO alembic_version VALUES ('0004');
